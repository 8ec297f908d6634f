"""Programs that measure a peer in its own process, with its own packages.

They are run by path and import nothing of sparsekv; each prints one line of JSON at its end.
"""
