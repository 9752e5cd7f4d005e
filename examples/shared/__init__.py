"""Shared by the trainers: settings, logging, start and end."""
