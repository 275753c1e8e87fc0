"""Sphinx extension: a page loads each script once, and nothing of Thebe, which this book lacks.

jupyter-book 1.0.4 registers MathJax and Thebe's settings twice; a `const` declared twice, or two
MathJax in one page, are errors in the browser's console. Of two the deferred one stays: it runs
after its settings.
"""


def _key(script) -> str:
    return str(script.filename or script.attributes.get("body", ""))


def keep_one_of_each(app, pagename, templatename, context, doctree) -> None:
    chosen = {}
    for script in context.get("script_files", []):
        key = _key(script)
        if "thebe" not in key.lower() and (key not in chosen or "defer" in script.attributes):
            chosen[key] = script
    context["script_files"] = list(chosen.values())


def setup(app) -> dict:
    app.connect("html-page-context", keep_one_of_each, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
