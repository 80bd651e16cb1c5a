"""The page: Gradio's components, and what happens when they are used."""

# No postponed annotations here: Gradio reads the annotations of the functions that it calls.
import dataclasses
import html
import traceback
from pathlib import Path
from typing import Any

from tokenmerge.errors import TokenMergingError
from tokenmerge_tools import demo
from tokenmerge_tools.drawing import Progress
from tokenmerge_tools.method_spec import AUTO, METHODS
from tokenmerge_tools.pipelines.options import LONGEST_PROMPT
from tokenmerge_tools.play import texts
from tokenmerge_tools.play.form import Form
from tokenmerge_tools.play.gate import Visitors
from tokenmerge_tools.play.trials import Stop, StoppedError, Trial, Trials

STYLE = Path(__file__).with_name("page.css")
_MOST_SPEEDUP = 5
_MOST_RATIO = 0.75
_KEPT = 24  # trials in the gallery of one visitor
_SHORTEST_ERROR = 20  # seconds that an error stays on the page


def build(model: str, visitors: Visitors, **machine: Any) -> Any:
    """Build the page as Gradio's ``Blocks``.

    ``model`` is chosen at first; the bundled ones can be chosen too. The trial of a visitor who leaves is
    stopped. ``machine`` has the ``device`` and ``dtype`` of all trials.
    """
    import gradio as gr

    drawer = Trials()
    first = Form.first(model)
    models = tuple(dict.fromkeys((model, *demo.NAMES)))
    with gr.Blocks(title="tokenmerge", analytics_enabled=False, fill_width=True) as page:
        trials = gr.State([])
        stop = gr.State()
        gr.Markdown(
            "# tokenmerge\nOne image from one seed: dense, with tokenmerge, and dense in fewer steps."
        )
        with gr.Row(elem_classes="columns"):
            with gr.Column(scale=2, min_width=300):
                fields, draw, halt = _fields(gr, models, first)
            with gr.Column(scale=5, min_width=300):
                shown = _results(gr)
        gallery = gr.Gallery(
            label="Tried before: choose one to see it again",
            **{"height": "auto", "object_fit": "contain", "format": "png", "elem_id": "tried"},
            **{"allow_preview": False, "buttons": [], "interactive": False, "visible": False},
        )

        own_progress = gr.Progress()  # Gradio finds it among the defaults, and replaces it in each call

        def stop_of(visitor: gr.Request) -> Stop:
            return Stop(lambda: visitor.session_hash in visitors)

        def begin(visitor: gr.Request) -> tuple[Stop, Any, Any]:
            return stop_of(visitor), gr.Button(interactive=False), gr.Button(interactive=True)

        def drawn(
            visitor: gr.Request,
            trials: list[Trial],
            stop: Stop | None,
            *values: Any,
            progress: Any = own_progress,
        ) -> list[Any]:
            def on_progress(now: Progress) -> None:
                progress((now.done, now.total), desc=now.part, unit="steps" if now.total > 1 else "")

            try:
                options = Form(*values).options(models, **machine)
                trial = drawer.draw(options, on_progress, stop or stop_of(visitor))
            except StoppedError:
                return [gr.skip()] * (len(shown) + 2)  # nobody waits for this result
            except Exception as error:
                if not isinstance(error, TokenMergingError):
                    traceback.print_exc()
                raise gr.Error(
                    texts.sentence(error), duration=_SHORTEST_ERROR, print_exception=False
                ) from error
            for warning in trial.warnings:
                gr.Warning(html.escape(warning))
            kept = [trial, *trials][:_KEPT]
            gallery = gr.Gallery([(one.merged, texts.caption(one)) for one in kept], visible=True)
            return [*_content(gr, trial), kept, gallery]

        def end() -> tuple[Any, Any]:
            return gr.Button(interactive=True), gr.Button(interactive=False)

        def halted(stop: Stop | None) -> None:
            if stop is not None:
                stop.asked = True
            gr.Info("This trial was discarded.", title="Stopped")

        def again(trials: list[Trial], chosen: gr.EventData) -> list[Any]:
            index = chosen._data.get("index") if isinstance(chosen._data, dict) else None
            if type(index) is not int or not 0 <= index < len(trials):
                advice = "Choose one of the images tried before; press Draw for the first one."
                raise gr.Error(advice, print_exception=False)
            trial = trials[index]
            return [*_content(gr, trial), *dataclasses.astuple(Form.of(trial.options))]

        private = {"api_visibility": "private"}
        quick = {**private, "show_progress": "hidden"}
        drawing = gr.on([draw.click, fields[1].submit], begin, None, [stop, draw, halt], **quick).then(
            drawn,
            [trials, stop, *fields],
            [*shown, trials, gallery],
            preprocess=False,  # Form checks the values, and says what is wrong with them
            show_progress_on=shown[0],
            concurrency_limit=1,
            **private,
        )
        drawing.success(end, None, [draw, halt], **quick)
        drawing.failure(end, None, [draw, halt], **quick)
        # A waiting trial leaves the queue; a running one ends after its step.
        method, speedup, ratio = fields[-3:]
        method.change(_amounts(gr), method, [speedup, ratio], **quick)
        halt.click(halted, stop, None, cancels=drawing, **quick).then(end, None, [draw, halt], **quick)
        gallery.select(again, trials, [*shown, *fields], **quick)
    return page


def _fields(gr: Any, models: tuple[str, ...], first: Form) -> tuple[list[Any], Any, Any]:
    """Return the fields in the order of :class:`Form`, and the buttons to draw and to stop."""
    fields = [
        gr.Dropdown(list(models), value=first.model, label="Model"),
        gr.Textbox(
            first.prompt,
            label="Prompt",
            lines=2,
            max_length=LONGEST_PROMPT,
            submit_btn=False,
            elem_id="prompt",
        ),
    ]
    with gr.Row():
        fields.append(gr.Number(first.seed, label="Seed", precision=0, min_width=100))
        size = gr.Textbox(first.size, label="Size", placeholder="default", min_width=100, elem_id="size")
        fields.append(size)
    with gr.Row():
        fields.append(gr.Number(first.steps, label="Steps", precision=0, min_width=100, elem_id="steps"))
        fields.append(gr.Textbox(first.guidance, label="Guidance", placeholder="the model's", min_width=100))
    fields.append(gr.Dropdown(list(METHODS), value=first.method, label="Method", elem_id="method"))
    speedup = gr.Slider(1, _MOST_SPEEDUP, first.speedup, step=0.1, label="Speed-up by operations")
    ratio = gr.Slider(0, _MOST_RATIO, first.ratio, step=0.05, label="Ratio of tokens that merge")
    ratio.visible = "hidden"
    fields += [speedup, ratio]
    with gr.Row():
        draw = gr.Button("Draw", variant="primary", elem_id="draw", min_width=100)
        halt = gr.Button("Stop", interactive=False, elem_id="stop", min_width=100)
    return fields, draw, halt


def _amounts(gr: Any) -> Any:
    """Return a function that shows the slider which the chosen method reads, and hides the other one."""

    def show(method: str) -> tuple[Any, Any]:
        by_speed = method == AUTO
        return gr.Slider(visible=by_speed or "hidden"), gr.Slider(visible=not by_speed or "hidden")

    return show


def _results(gr: Any) -> list[Any]:
    """Return the components that show a trial, in the order of :func:`_content`."""
    tiles = gr.HTML(texts.NOTHING_YET, elem_id="tiles", min_height=88, padding=False)
    with gr.Row():
        images = {"type": "pil", "format": "png", "interactive": False}
        images["buttons"] = ["download", "fullscreen"]
        slider = gr.ImageSlider(label="Dense | tokenmerge", min_width=280, elem_id="pair", **images)
        fewer = gr.Image(label="Dense, fewer steps", min_width=280, elem_id="fewer", **images)
        with gr.Column(min_width=280):
            groups = gr.Image(label="What merges", elem_id="groups", **images)
            caption = gr.HTML(padding=False, elem_id="caption")
    code: dict[str, Any] = {"language": None, "interactive": False, "lines": 1, "buttons": ["copy"]}
    code |= {"show_line_numbers": False, "wrap_lines": True}
    with gr.Column(visible=False) as rest:
        plan = gr.Code(label="Plan: what each step did", elem_id="plan", **code)
        python = gr.Code(label="Python: this image from your pipeline", elem_id="python", **code)
        tune = gr.Code(label="Send to tune: measure it on several prompts", elem_id="tune", **code)
        with gr.Accordion("What ran, and what that saves", open=False):
            details = gr.Code(show_label=False, **code)
    return [tiles, slider, fewer, groups, caption, plan, python, tune, details, rest]


def _content(gr: Any, trial: Trial) -> list[Any]:
    return [
        texts.tiles(trial),
        (trial.dense, trial.merged),
        _fewer(gr, trial),
        trial.groups,
        texts.groups(trial),
        texts.plan(trial),
        texts.python_lines(trial.options),
        texts.tune_command(trial),
        texts.details(trial),
        gr.Column(visible=True),
    ]


def _fewer(gr: Any, trial: Trial) -> Any:
    """Return the dense image in fewer steps, which is hidden if all steps would take as long."""
    if trial.fewer is None:
        return gr.Image(None, visible=False)
    return gr.Image(trial.fewer.image, label=texts.fewer_steps(trial.fewer), visible=True)
