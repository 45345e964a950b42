"""Tools that look at runs from outside: verification, planning, offline work, measurements, launching."""
