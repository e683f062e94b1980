"""The ids of a turn: what is appended, what stays, what is encoded anew."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentkv.core.batch import TokenArray
from agentkv.errors import (
    ChatTemplateError,
    ContextLengthError,
    InvalidOptionError,
    RequestError,
)
from agentkv.messages import FinishReason, Message
from agentkv.testing.byte_tokenizer import byte_tokenizer
from agentkv.text import conversation as text
from agentkv.text.conversation import Conversation, Entry, TurnPlan
from agentkv.text.tokenizer import ChatTokenizer

PLAIN = byte_tokenizer()
VARIANTS = ("plain", "default_system", "strip_reasoning", "reject_lone_system")
END = 258
LIMIT = 100_000


class Ids:
    """Stored ids as a plain list."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def slice(self, start: int, stop: int) -> TokenArray:
        return np.array(self.ids[start:stop], dtype=np.int32)


@dataclass
class Talk:
    """A conversation with its ids, as a session keeps them."""

    tokenizer: ChatTokenizer | None = PLAIN
    conversation: Conversation = field(default_factory=text.start)
    ids: list[int] = field(default_factory=list)

    def plan(self, *entries: Entry, reply: bool = True, limit: int = LIMIT) -> TurnPlan:
        return text.plan(
            self.tokenizer,
            self.conversation,
            Ids(self.ids),
            entries,
            limit=limit,
            reply=reply,
            vocab_size=260,
        )

    def turn(
        self,
        *entries: Entry,
        says: str,
        ends: tuple[int, ...] = (END,),
        reason: FinishReason = "stop",
    ) -> TurnPlan:
        plan = self.plan(*entries)
        self.ids = [*self.ids[: plan.keep], *plan.new_ids.tolist(), *says.encode(), *ends]
        self.conversation = text.commit(plan, says, reason)
        return plan

    def warm(self) -> TurnPlan:
        plan = self.plan(reply=False)
        self.ids = [*self.ids[: plan.keep], *plan.new_ids.tolist()]
        self.conversation = plan.conversation
        return plan

    def read(self) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.ids, skip_special=False)


def user(content: str) -> Message:
    return Message("user", content)


def fresh(tokenizer: ChatTokenizer, *messages: Message) -> list[int]:
    return tokenizer.encode_chat(messages)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_conversation_has_the_ids_of_its_whole_rendering(variant: str) -> None:
    talk = Talk(byte_tokenizer(variant))  # type: ignore[arg-type]  # the parameters are variants
    assert talk.tokenizer is not None
    for turn in ("one", "two", "three"):
        plan = talk.turn(user(turn), says=f"answer {turn}")
        assert plan.keep == len(talk.ids) - len(plan.new_ids) - len(f"answer {turn}") - 1
    rendered = talk.tokenizer.render(talk.conversation.messages, add_generation_prompt=False)
    assert talk.read() + "\n" == rendered


def test_a_turn_appends_and_keeps_all_stored_ids() -> None:
    talk = Talk(conversation=text.start([Message("system", "s")]))
    talk.turn(user("hi"), says="hello")
    before = list(talk.ids)
    plan = talk.plan(user("more"))
    assert plan.keep == len(before)
    assert PLAIN.decode(plan.new_ids.tolist(), skip_special=False) == (
        "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("reason", ["length", "stopped", "stop"])
def test_a_reply_without_its_end_of_turn_gets_it_first(reason: FinishReason) -> None:
    talk = Talk()
    talk.turn(user("hi"), says="partial", ends=(), reason=reason)
    new = talk.plan(user("more")).new_ids.tolist()
    assert new[0] == END
    assert new.count(END) == 2


def test_ids_behind_a_cut_text_stay() -> None:
    talk = Talk()
    talk.turn(user("hi"), says="shown", ends=tuple(b"STOP"))
    plan = talk.plan(user("more"))
    assert plan.keep == len(talk.ids)
    assert plan.new_ids[0] == END


@pytest.mark.parametrize("says", [" padded ", "\n\n", "", "two\nlines\n"])
@pytest.mark.parametrize("trim", ["m.content", "m.content | trim", "m.content.rstrip()"])
def test_white_space_at_a_replys_edges_is_not_a_rewriting(says: str, trim: str) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + trim + " }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    talk = Talk(ChatTokenizer(PLAIN.backend, chat_template=template))
    talk.turn(user("hi"), says=says)
    plan = talk.plan(user("more"))
    assert plan.keep == len(talk.ids)
    assert bytes(plan.new_ids.tolist()[:1]) == b"\n"


def test_a_rewritten_reply_is_encoded_anew_and_what_is_before_it_stays() -> None:
    talk = Talk(byte_tokenizer("strip_reasoning"))
    talk.turn(user("one"), says="plain")
    talk.turn(user("two"), says="because</think>two!")
    before = len(talk.ids) - len("because</think>two!") - 1
    plan = talk.turn(user("three"), says="ok")
    assert plan.keep == before
    assert "because" not in talk.read()
    assert talk.ids[: -len("ok") - 1] == fresh(
        byte_tokenizer("strip_reasoning"),
        user("one"),
        Message("assistant", "plain"),
        user("two"),
        Message("assistant", "because</think>two!"),
        user("three"),
    )
    again = talk.plan(user("four"))
    assert again.keep == len(talk.ids)


def test_a_template_that_moves_the_system_prompt_is_followed() -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}<|im_start|>"
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
        "{{ m.content }}<|im_end|>{% endfor %}"
    )
    tokenizer = ChatTokenizer(PLAIN.backend, chat_template=template)
    talk = Talk(tokenizer, text.start([Message("system", "SYS")]))
    talk.turn(user("one"), says="1")
    talk.turn(user("two"), says="2")
    expected = fresh(
        tokenizer, Message("system", "SYS"), user("one"), Message("assistant", "1"), user("two")
    )
    assert talk.ids[:-2] == expected


def test_warming_changes_neither_ids_nor_text_of_the_next_turn() -> None:
    cold = Talk(conversation=text.start([Message("system", "s")]))
    warm = Talk(conversation=text.start([Message("system", "s")]))
    assert not warm.warm().is_empty
    assert warm.warm().is_empty
    assert warm.plan(user("hi")).keep == len(warm.ids) > 0
    cold.turn(user("hi"), says="x")
    warm.turn(user("hi"), says="x")
    assert warm.ids == cold.ids
    assert warm.conversation.messages == cold.conversation.messages


def test_warmed_messages_can_still_be_answered() -> None:
    talk = Talk(conversation=text.start([user("hi")]))
    talk.warm()
    plan = talk.plan()
    assert plan.keep == len(talk.ids)
    assert [*talk.ids, *plan.new_ids.tolist()] == fresh(PLAIN, user("hi"))


def test_a_template_that_rejects_a_lone_system_message_is_warmed_all_the_same() -> None:
    talk = Talk(byte_tokenizer("reject_lone_system"), text.start([Message("system", "rules")]))
    talk.warm()
    assert "rules" in talk.read()
    assert talk.plan(user("anything")).keep == len(talk.ids)


def test_raw_ids_are_appended_as_they_are_and_text_is_rendered_after_them() -> None:
    talk = Talk(conversation=text.start([Message("system", "s")]))
    head = PLAIN.encode_markup("<|im_start|>system\ns<|im_end|>\n")
    talk.turn((65, 66, 258, 67), says="reply")
    assert talk.ids == [*head, 65, 66, 258, 67, *b"reply", END]
    before = list(talk.ids)
    talk.turn((1, 2, 3), says="again")
    assert talk.ids == [*before, 1, 2, 3, *b"again", END]
    before = list(talk.ids)
    talk.turn(user("text"), says="!")
    expected = PLAIN.encode_markup("\n<|im_start|>user\ntext<|im_end|>\n<|im_start|>assistant\n!")
    assert talk.ids == [*before, *expected, END]


def test_raw_ids_between_messages_stand_between_their_texts() -> None:
    talk = Talk()
    plan = talk.plan(user("a"), (7, 8), user("b"))
    first = PLAIN.encode_markup("<|im_start|>user\na<|im_end|>\n")
    second = PLAIN.encode_markup("<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n")
    assert plan.new_ids.tolist() == [*first, 7, 8, *second]


def test_text_after_a_reply_to_raw_ids_works_where_roles_must_alternate() -> None:
    template = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate!') }}{% endif %}[{{ m.content }}]{% endfor %}"
    )
    talk = Talk(ChatTokenizer(PLAIN.backend, chat_template=template))
    talk.turn((65, 66), says="reply", ends=())
    assert bytes(talk.plan(user("hi")).new_ids.tolist()) == b"][hi]"


def test_a_conversation_from_ids_takes_only_ids() -> None:
    talk = Talk(tokenizer=None, conversation=text.start_from_ids([1, 2, 3]))
    talk.turn(says="x")
    talk.turn((4, 5), says="y")
    assert talk.ids == [1, 2, 3, ord("x"), END, 4, 5, ord("y"), END]
    with pytest.raises(ChatTemplateError):
        talk.plan(user("text"))


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ChatTemplateError):
        Talk(tokenizer=None).plan(user("text"))


def test_a_reply_cut_short_is_continued_and_its_text_joined() -> None:
    talk = Talk()
    talk.turn(user("hi"), says="par", ends=(), reason="length")
    plan = talk.plan()
    assert plan.is_continuation
    assert (plan.keep, len(plan.new_ids)) == (len(talk.ids), 0)
    before = list(talk.ids)
    talk.turn(says="tial")
    assert talk.ids == [*before, *b"tial", END]
    assert talk.conversation.messages[-1] == Message("assistant", "partial")
    assert talk.plan(user("more")).keep == len(talk.ids)
    with pytest.raises(RequestError, match="nothing to answer"):
        talk.plan()


def test_a_character_broken_by_the_end_is_mended_when_the_reply_goes_on() -> None:
    talk = Talk()
    plan = talk.plan(user("hi"))
    first, second = "é".encode()
    talk.ids = [*plan.new_ids.tolist(), ord("x"), first]
    talk.conversation = text.commit(plan, "x\ufffd", "length")
    plan = talk.plan()
    assert plan.reply_context[-1] == first
    assert plan.broken == "\ufffd"
    talk.ids.append(second)
    talk.conversation = text.commit(plan, "é", "length")
    assert talk.conversation.messages[-1].content == "xé"


def test_nothing_to_answer_is_refused() -> None:
    with pytest.raises(RequestError, match="nothing to answer"):
        Talk().plan()
    with pytest.raises(RequestError, match="nothing to answer"):
        Talk().plan(())
    empty = Talk(ChatTokenizer(PLAIN.backend, chat_template="{{ messages[0].content }}"))
    with pytest.raises(RequestError, match="empty"):
        empty.plan(user(""))
    assert Talk().plan(reply=False).is_empty


def test_a_planned_turn_that_is_discarded_leaves_the_conversation_as_it_was() -> None:
    talk = Talk(conversation=text.start([Message("system", "s")]))
    talk.turn(user("hi"), says="hello")
    before = talk.conversation
    first = talk.plan(user("a"))
    talk.plan(user("b"))
    assert talk.conversation is before
    assert talk.plan(user("a")).new_ids.tolist() == first.new_ids.tolist()


def test_long_texts_and_id_lists_are_refused_before_any_work() -> None:
    longest = PLAIN.max_token_chars
    with pytest.raises(ContextLengthError):
        Talk().plan(user("x" * (10 * longest + 1)), limit=10)
    with pytest.raises(ContextLengthError):
        Talk().plan((1,) * 11, limit=10)


@pytest.mark.parametrize("bad", [-1, 2**31, True, 1.0, "5", None, np.float32(1), 2**63, [1]])
def test_bad_ids_are_refused(bad: object) -> None:
    with pytest.raises(InvalidOptionError):
        text.checked_ids([1, bad])


def test_numpy_ids_are_taken_and_ids_beyond_the_vocabulary_refused() -> None:
    assert text.checked_ids(np.array([1, 2], dtype=np.uint16)) == (1, 2)
    assert text.checked_ids([np.int64(3)]) == (3,)
    with pytest.raises(InvalidOptionError):
        text.checked_ids(np.array([[1], [2]]))
    with pytest.raises(InvalidOptionError):
        Talk().plan((259, 260))


@pytest.mark.parametrize(
    "message",
    [Message("robot", "x"), Message("user", 5), Message(None, "x"), Message("user", None)],  # type: ignore[arg-type]  # bad on purpose
)
def test_bad_messages_are_refused(message: Message) -> None:
    with pytest.raises(RequestError):
        text.start([message])


CONTENTS = st.text(st.sampled_from("ab<|im_end|> \n</think>é"), max_size=8)
TURNS = st.lists(
    st.tuples(
        st.sampled_from(["user", "ids", "continue", "warm"]),
        CONTENTS,
        CONTENTS,
        st.sampled_from([(), (END,)]),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(VARIANTS), TURNS)
def test_any_history_keeps_its_ids_unless_the_template_rewrites(
    variant: str, turns: list[tuple[str, str, str, tuple[int, ...]]]
) -> None:
    tokenizer = byte_tokenizer(variant)  # type: ignore[arg-type]  # sampled from the variants
    talk = Talk(tokenizer)
    for kind, said, answer, ends in turns:
        before = list(talk.ids)
        reason: FinishReason = "stop" if ends else "length"
        if kind == "warm":
            plan = talk.warm()
        elif kind == "continue" and talk.conversation.is_open:
            plan = talk.turn(says=answer, ends=ends, reason=reason)
        elif kind == "ids" and said:
            plan = talk.turn(tuple(said.encode()), says=answer, ends=ends, reason=reason)
        else:
            plan = talk.turn(user(said), says=answer, ends=ends, reason=reason)
        rewrites = variant == "strip_reasoning" and "</think>" in tokenizer.decode(before)
        assert rewrites or plan.keep == len(before)
        assert talk.ids[: plan.keep] == before[: plan.keep]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(CONTENTS, CONTENTS), min_size=1, max_size=4))
def test_replies_that_encode_canonically_give_the_ids_of_a_fresh_rendering(
    turns: list[tuple[str, str]],
) -> None:
    talk, messages = Talk(byte_tokenizer("strip_reasoning")), []
    assert talk.tokenizer is not None
    for said, answer in turns:
        plan = talk.plan(user(said))
        messages.append(user(said))
        asked = [*talk.ids[: plan.keep], *plan.new_ids.tolist()]
        assert asked == fresh(talk.tokenizer, *messages)
        talk.turn(user(said), says=answer)
        messages.append(Message("assistant", answer))


def test_the_real_template_appends_only_the_new_turn(smollm2: ChatTokenizer) -> None:
    conversation = text.start()
    plan = text.plan(
        smollm2, conversation, Ids([]), [user("Hi")], limit=LIMIT, reply=True, vocab_size=49152
    )
    assert plan.new_ids.tolist() == fresh(smollm2, user("Hi"))
    sampled = smollm2.encode("Hello! How are you?")
    ids = [*plan.new_ids.tolist(), *sampled, 2]
    conversation = text.commit(plan, "Hello! How are you?", "stop")
    plan = text.plan(
        smollm2, conversation, Ids(ids), [user("Fine")], limit=LIMIT, reply=True, vocab_size=49152
    )
    assert plan.keep == len(ids)
    assert [*ids, *plan.new_ids.tolist()] == fresh(
        smollm2, user("Hi"), Message("assistant", "Hello! How are you?"), user("Fine")
    )
