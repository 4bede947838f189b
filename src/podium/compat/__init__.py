"""Names of other projects, as thin layers over Podium's own. Nothing in Podium imports them."""
