"""The playground: a page in the browser that draws one image dense and merged, and compares the two.

``form`` and ``texts`` have no side effects: they read the page's fields and write its texts. ``trials`` has
the model and draws. Only ``page`` and ``server`` import Gradio, when they are called.
"""
