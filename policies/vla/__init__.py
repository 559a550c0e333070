"""Vision-language-action models behind the protocol of policies; they need the extra `vla`."""
