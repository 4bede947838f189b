"""Pools of ranks as values, which node serves which rank, and how ranks are numbered. No Ray here."""
