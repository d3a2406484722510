"""The flags of verbs whose code imports torch, kept apart so that --help and a mistake do not wait for torch."""
