"""What commands print: tables, progress, the status line."""
