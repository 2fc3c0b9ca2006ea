"""The node exporter of a GPU job: readers, derivations, collectors and one small HTTP service.

Importing this package imports nothing else, so that the launcher and the worker
wrapper can use ``exporter.contract.manifest`` and ``exporter.contract.run_files`` for next to nothing.
"""

__version__ = "0.2.0"
