"""`raylight ui`: the records of runs in the browser, live and afterwards.

It reads the directories of runs and never writes what it shows; its search index is a separate file.
"""
