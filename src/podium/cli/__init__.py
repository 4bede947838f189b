"""The command line `podium`."""
