"""The server of a federation of sites: listens, gathers the sites' censuses, runs the experiment, and keeps a log."""
