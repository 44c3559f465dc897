"""What a site of a federation runs: its connection to the server."""
