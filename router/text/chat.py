"""A chat as one prompt, by the template that came with the model. `transformers` runs it in Jinja's sandbox."""

from typing import Any

from jinja2.exceptions import TemplateError

from octavo.errors import FieldViolation, OctavoError, invalid_argument
from router.request import Chat

MAX_REASON_CHARS = 200


def render(pretrained: Any, chat: Chat) -> str:
    """Apply the chat template.

    Raises:
        OctavoError: INVALID_ARGUMENT for `chat.messages`, with the template's own words but without the messages.
    """
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    try:
        return pretrained.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=chat.add_generation_prompt,
            continue_final_message=not chat.add_generation_prompt,
        )
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise _refused(error, chat) from error


def _refused(error: Exception, chat: Chat) -> OctavoError:
    reason = str(error)[:MAX_REASON_CHARS]
    # What a user wrote belongs neither into a log nor into a status.
    if any(message.content and message.content in reason for message in chat.messages):
        reason = type(error).__name__
    return invalid_argument(FieldViolation("chat.messages", f"the model's chat template refuses them: {reason}"))
