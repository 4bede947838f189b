"""What runs inside a rank: which rank this code is, on which device, and how it runs the user's methods."""
