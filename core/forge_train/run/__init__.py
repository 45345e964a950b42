"""The folder of a run: its lock, records and artifacts; and the requests that stop or save it."""
