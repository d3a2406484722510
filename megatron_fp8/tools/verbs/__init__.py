"""Verbs whose work needs torch from its first line: their flags, so that --help and a mistake do not wait for it."""
