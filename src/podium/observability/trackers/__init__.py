"""The trackers of the table `podium.parts.TRACKERS`, a module each, which imports its library when a tracker is constructed."""
