"""How the arguments of a call are split over the ranks, and how the results are joined. Pure functions."""
