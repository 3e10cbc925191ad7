"""A chat as one prompt, by the template that came with the model, and what a client is told where there is none.

Not here: how templates are run (`template_process`).
"""

from octavo.errors import Code, FieldViolation, OctavoError, invalid_argument
from router.request import Chat
from router.text.template_process import RenderingEndedError, TemplateProcesses


def render(template: TemplateProcesses, chat: Chat, max_chars: int) -> str:
    """Apply the chat template. Waits for another process: call it off the event loop.

    Raises:
        OctavoError: INVALID_ARGUMENT for `chat.messages`, with the template's own words but without the messages, or
            where it takes too much time or memory; FAILED_PRECONDITION for more than `max_chars` characters.
    """
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        answer = template.render(messages, add_generation_prompt=chat.add_generation_prompt, max_chars=max_chars)
    except RenderingEndedError as error:
        raise _refused(f"the model's chat template cannot be applied to them: {error}") from error
    if answer.get("is_too_long"):
        raise OctavoError(
            Code.FAILED_PRECONDITION,
            "NEVER_FITS",
            f"the chat's prompt can never fit: it has more than {max_chars} characters",
            metadata={"max_prompt_characters": str(max_chars)},
        )
    if "reason" in answer:
        raise _refused(f"the model's chat template refuses them: {answer['reason']}")
    return str(answer["text"])


def _refused(description: str) -> OctavoError:
    return invalid_argument(FieldViolation("chat.messages", description))
