"""Parts that only some users need. The scripts can train on files without this folder."""
