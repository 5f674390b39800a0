"""Other libraries' Python interfaces over this one."""
