"""The FP8 GEMM: its interface, the backends that compute it, and the search for the fastest one of a shape."""

from .interface import Computed, Epilogue, Operand, Product, gemm, plain

__all__ = ["Computed", "Epilogue", "Operand", "Product", "gemm", "plain"]
