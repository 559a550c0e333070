"""Learners of the stage `offline`, from recorded episodes alone."""
