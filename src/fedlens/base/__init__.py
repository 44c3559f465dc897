"""What every room uses: errors, names in registries, checks of a user's objects, text, threads, memory."""
