"""The folder of a run: its start, records and artifacts; and the requests that stop or save it."""
