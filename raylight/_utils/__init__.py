"""Helpers without a subject of their own: files, asyncio, threads, this machine, bounds of numbers."""
