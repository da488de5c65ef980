"""The sandbox in which chat templates run: Jinja's immutable one, with bounds on time and memory.

Theory of operation
-------------------
Jinja's own sandbox keeps a template away from Python's inside, and from changing its input. It
does not keep it from being a bomb: ten lines double a string forty times, loop in a loop, or
copy a long list for each pass of one. So here each rendering has a
:class:`~dynamo_trio.wire.openai.meter.Meter`, and

* every pass through a loop, a macro or a block is charged at its head, by the nodes in it; the
  charge is put there before the template is compiled;
* what an expression compares, slices, adds, joins or writes down is charged by its length, in the
  code that Jinja's compiler makes of it (:class:`_Generator`);
* every filter, and every method that may be called, has its price
  (:mod:`~dynamo_trio.wire.openai.sandbox_calls`). What has none is not there: methods of numbers
  and bytes, padding to a width, formatting with ``%``.
"""

from __future__ import annotations

from operator import eq, ge, gt, le, lt, ne
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.compiler
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from dynamo_trio.wire.openai.meter import CALL, Bound, Meter, text
from dynamo_trio.wire.openai.sandbox_calls import metered_filters, metered_tests, prepare, take

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jinja2.compiler import Frame

#: Units of a pass through a loop, and through a macro, beside those of what is in it.
PASS, MACRO = 20, 400
#: Characters of the template's own text that are written without being charged.
_FREE_TEXT = 64
#: Bits of a number. No operation on two such takes long.
MAX_BITS = 4096

_ATOMS = (int, float, type(None), jinja2.Undefined)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": eq, "ne": ne, "lt": lt, "lteq": le, "gt": gt, "gteq": ge,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}  # fmt: skip


class Context(jinja2.runtime.Context):
    """The variables of one rendering, and its meter."""

    meter: Meter

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        made = super().derived(locals)
        assert isinstance(made, Context)
        made.meter = self.meter
        return made


@jinja2.pass_context
def _finalize(context: Context, value: object) -> object:
    """What is written out: charged, and a list or the like weighed."""
    if not isinstance(value, (str, *_ATOMS)):
        value = text(context.meter, value)
    context.meter.charge(len(value) + 2 if isinstance(value, str) else 10)
    return value


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The environment that compiles and runs templates."""

    context_class = Context
    intercepted_binops = frozenset({"+", "*", "**", "%", "//", "/", "-"})

    def __init__(self, *extensions: type[jinja2.ext.Extension]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_finalize
        )
        self.code_generator_class = _Generator
        self.filters = metered_filters(self.filters)
        self.tests = metered_tests(self.tests)
        del self.globals["lipsum"]

    def context_of(
        self, template: jinja2.Template, meter: Meter, values: dict[str, object]
    ) -> Context:
        """What ``template.root_render_func`` renders; ``values``: the template's globals, too."""
        context = template.new_context(values, shared=True)  # so they are not put together again
        assert isinstance(context, Context)
        context.meter = meter
        return context

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _bounded(super()._parse(source, name, filename))

    # --- what the compiled template calls -----------------------------------------------------

    @staticmethod
    def step(context: Context, units: int) -> bool:
        """The head of a body. True, since the test of a loop begins with it, too."""
        context.meter.charge(units)
        return True

    @staticmethod
    def concat_text(context: Context, *parts: object) -> str:
        """``a ~ b``."""
        meter = context.meter
        texts = [text(meter, part) for part in parts]
        meter.fit(sum(map(len, texts)), "a text")
        return "".join(texts)

    @staticmethod
    def weighed(context: Context, value: object) -> object:
        """A list, tuple or dictionary that was written down."""
        context.meter.weigh(value)
        return value

    @staticmethod
    def sliced(context: Context, value: Any, part: slice) -> Any:
        made = value[part]
        context.meter.length(made)
        return made

    @staticmethod
    def compared(context: Context, left: Any, *others: Any) -> bool:
        """``left < b <= c``, as ``"lt", b, "lteq", c``."""
        made = True
        for name, right in zip(others[::2], others[1::2], strict=True):
            prepare(context.meter, left, right, inside=name in ("in", "notin"))
            made = _COMPARISONS[name](left, right)
            if not made:
                break
            left = right
        return made

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        assert isinstance(context, Context)
        meter = context.meter
        if operator == "+" and type(left) is str and type(right) is str:
            meter.fit(len(left) + len(right), "a sum")  # as nearly always
            return left + right
        if operator == "+":
            meter.fit(_length(left) + _length(right), "a sum")
        elif isinstance(left, int) and isinstance(right, int):
            _check_numbers(operator, left, right)
        elif operator == "%" and isinstance(left, (str, bytes)):
            raise Bound("formatting with %")
        elif operator == "*":
            meter.fit(_repeated(left, right), "a repetition")
        made = super().call_binop(context, operator, left, right)
        if isinstance(made, (list, tuple)):
            meter.weigh(made)
        return made

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        assert isinstance(__context, Context)
        meter = __context.meter
        meter.charge(CALL)
        done = take(__self, meter, __obj, args, kwargs)
        if done is not None:
            return done
        made = super().call(__context, __obj, *args, **kwargs)
        if isinstance(made, dict):
            meter.weigh(made)
        else:
            meter.length(made)
        return made


# --- the compiler ----------------------------------------------------------------------------


def _bounded(tree: jinja2.nodes.Template) -> jinja2.nodes.Template:
    """The template with its passes charged, and its long texts written as expressions."""
    if tree.find(jinja2.nodes.EvalContextModifier):
        raise jinja2.exceptions.TemplateSyntaxError("there is no autoescape here", 1)
    for loop in list(tree.find_all(jinja2.nodes.For)):
        units = PASS + _count(loop.body)
        loop.body.insert(0, _statement(_step(units), loop.lineno))
        if loop.test is not None:  # it is asked of what no pass is made for, too
            loop.test = jinja2.nodes.And(_step(PASS + _count([loop.test])), loop.test)
    bodies = (jinja2.nodes.Macro, jinja2.nodes.CallBlock, jinja2.nodes.Block)
    for part in list(tree.find_all(bodies)):
        body: list[jinja2.nodes.Node] = part.body  # type: ignore[attr-defined]  # all have one
        body.insert(0, _statement(_step(MACRO + _count(body)), part.lineno))
    for output in tree.find_all(jinja2.nodes.Output):
        output.nodes = [_charged(node) for node in output.nodes]
    return tree


def _count(nodes: Iterable[jinja2.nodes.Node]) -> int:
    """Nodes that one pass may run; the bodies in it have heads of their own."""
    count, todo = 0, list(nodes)
    while todo:
        node = todo.pop()
        count += 1
        inner = isinstance(node, (jinja2.nodes.For, jinja2.nodes.Macro, jinja2.nodes.CallBlock))
        todo += node.iter_child_nodes(exclude=("body",) if inner else ())
    return count


def _charged(node: jinja2.nodes.Expr) -> jinja2.nodes.Expr:
    """A long text is no constant: then it is finalized each time, like what is computed."""
    if isinstance(node, jinja2.nodes.TemplateData) and len(node.data) > _FREE_TEXT:
        return jinja2.nodes.Const(node.data, lineno=node.lineno)
    return node


def _step(units: int) -> jinja2.nodes.Call:
    step = jinja2.nodes.EnvironmentAttribute("step")
    return jinja2.nodes.Call(step, [jinja2.nodes.Const(units)], [], None, None)


def _statement(call: jinja2.nodes.Call, lineno: int) -> jinja2.nodes.Node:
    return jinja2.nodes.ExprStmt(call).set_lineno(lineno)


def _is_short(node: jinja2.nodes.Node) -> bool:
    """Does it take no time to compare anything with this?"""
    if not isinstance(node, jinja2.nodes.Const):
        return False
    value = node.value
    return isinstance(value, _ATOMS) or (isinstance(value, str) and len(value) <= _FREE_TEXT)


class _Generator(jinja2.compiler.CodeGenerator):
    """Python of a template, in which what may take long goes by way of the sandbox.

    Those calls do not go by way of :meth:`Sandbox.call`, which takes ten times as long.
    """

    def visit_Call(
        self, node: jinja2.nodes.Call, frame: Frame, forward_caller: bool = False
    ) -> None:
        if isinstance(node.node, jinja2.nodes.EnvironmentAttribute):  # no template can write it
            self._ours(node.node.name, node.args, frame)
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: Frame) -> None:
        first = node.ops[0]
        if len(node.ops) == 1 and (
            _is_short(first.expr) or (first.op not in ("in", "notin") and _is_short(node.expr))
        ):
            super().visit_Compare(node, frame)
            return
        self.write("environment.compared(context, ")
        self.visit(node.expr, frame)
        for operand in node.ops:
            self.write(f", {operand.op!r}, ")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:
        self._ours("concat_text", node.nodes, frame)

    def visit_List(self, node: jinja2.nodes.List, frame: Frame) -> None:
        self._weighed(super().visit_List, node, node.items, frame)

    def visit_Dict(self, node: jinja2.nodes.Dict, frame: Frame) -> None:
        items = [one for pair in node.items for one in (pair.key, pair.value)]
        self._weighed(super().visit_Dict, node, items, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: Frame) -> None:
        if node.ctx != "load":
            super().visit_Tuple(node, frame)
        else:
            self._weighed(super().visit_Tuple, node, node.items, frame)

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, jinja2.nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(context, ")
        self.visit(node.node, frame)
        self.write(", slice(")
        for part in (node.arg.start, node.arg.stop, node.arg.step):
            self.visit(jinja2.nodes.Const(None) if part is None else part, frame)
            self.write(", ")
        self.write("))")

    def _weighed(
        self,
        write: Callable[[Any, Frame], None],
        node: jinja2.nodes.Expr,
        items: Sequence[jinja2.nodes.Node],
        frame: Frame,
    ) -> None:
        if all(map(_is_short, items)):  # as long as its source, which the pass was charged for
            write(node, frame)
            return
        self.write("environment.weighed(context, ")
        write(node, frame)
        self.write(")")

    def _ours(self, name: str, args: Sequence[jinja2.nodes.Node], frame: Frame) -> None:
        self.write(f"environment.{name}(context")
        for arg in args:
            self.write(", ")
            self.visit(arg, frame)
        self.write(")")


# --- operators -------------------------------------------------------------------------------


def _length(value: object) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _repeated(left: Any, right: Any) -> int:
    """Length of ``left * right`` when one of them is a sequence."""
    for one, times in ((left, right), (right, left)):
        if isinstance(one, (str, bytes, list, tuple)) and isinstance(times, int):
            return len(one) * max(times, 0)
    return 0


def _check_numbers(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() + right.bit_length()
    if operator == "**":
        bits = left.bit_length() * abs(right)
    if bits > MAX_BITS:
        raise Bound(f"numbers of more than {MAX_BITS} bits")
