"""Messages between a server and its sites, without a transport."""
