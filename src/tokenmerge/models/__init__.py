"""Facts about host models: where their blocks are, where the token grid comes from, which arguments follow.

``base``, ``layout`` and ``call`` hold the words that these facts are told in, ``families`` one file for each
family of models, and ``find`` the way from a pipeline to its models. May import ``ops`` and ``errors``;
knows nothing of planners or of patching.
"""
