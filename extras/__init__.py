"""Parts that only some users need. Every file uses the scripts above and can be deleted."""
