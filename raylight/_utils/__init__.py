"""Helpers that any package may use: files, asyncio, threads, this machine, bounds of numbers."""
