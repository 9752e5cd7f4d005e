"""What the trainers share: how they read settings, and how they begin and end."""
