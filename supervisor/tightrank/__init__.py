"""Supervisor daemon for LLM serving, sized and steered for the rank with the least free memory."""

__version__ = "0.1.0"
