"""The playground: a page in the browser that draws one picture dense and merged, and compares the two.

``form``, ``trial``, ``lines`` and ``texts`` are pure: what the page's fields mean, and what it says.
``studio`` holds the model and draws. Only ``page`` and ``server`` import Gradio, when they are called.
"""
