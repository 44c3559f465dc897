"""The links over which the engine `network` reaches its sites: `https`."""
