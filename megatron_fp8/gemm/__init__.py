"""The matrix product y = a b and what goes with it: which backend runs a shape, by which plan, how it is found."""

from .interface import Epilogue, Operand, Product, gemm

__all__ = ["Epilogue", "Operand", "Product", "gemm"]
