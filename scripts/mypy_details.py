"""A plugin of mypy: an attribute of `Details` that is no option of its settings is an error.

`Details[Owner]` has an attribute for each field of `Owner`, the class of settings (config/). Types
alone cannot say that, so without this mypy would take any name.
"""

from collections.abc import Callable

from mypy.nodes import Var
from mypy.plugin import AttributeContext, Plugin
from mypy.types import Instance, Type, TypeVarType, get_proper_type

DETAILS = "lmi_vllm.config.setting.Details"


def check_field(context: AttributeContext) -> Type:
    """Report a name that is no field of the owner."""
    name = getattr(context.context, "name", "")
    if name.startswith("_") or not isinstance(context.type, Instance):
        return context.default_attr_type
    owner = get_proper_type(context.type.args[0])
    if isinstance(owner, TypeVarType):
        owner = get_proper_type(owner.upper_bound)
    field = owner.type.get(name) if isinstance(owner, Instance) else None
    if field is None or not isinstance(field.node, Var) or field.node.is_classvar:
        context.api.fail(f'"{name}" is no option of "{owner}"', context.context)
    return context.default_attr_type


class DetailsPlugin(Plugin):
    """Registers the check of every attribute of `Details`."""

    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        """Return the check for an attribute of `Details`."""
        return check_field if fullname.startswith(f"{DETAILS}.") else None


def plugin(_version: str) -> type[Plugin]:
    """Return the plugin; mypy calls this."""
    return DetailsPlugin
