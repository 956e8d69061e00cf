"""Parts that only some users need. The scripts work without this folder."""
