"""`rtdetr benchmark`: one file per measurement. Only the command line imports from here."""
