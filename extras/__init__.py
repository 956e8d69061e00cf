"""Parts that only some users need. Every file uses the scripts and can be deleted."""
