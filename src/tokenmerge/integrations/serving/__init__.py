"""Plug-ins for servers that run diffusers pipelines: one file for each server.

A server finds its plug-in by an entry point of this package. The plug-in does nothing unless the environment
of the server asks for token merging, see :mod:`tokenmerge.integrations.serving.asked`. Nothing heavy is
imported before a server with such an environment calls the plug-in.
"""
