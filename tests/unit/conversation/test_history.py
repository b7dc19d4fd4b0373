"""What the model is given of a thread."""

from services.conversation.domain.history import (
    PastMessage,
    estimate_tokens,
    select_recent,
    system_text,
    to_chat_messages,
)


def user(text: str) -> PastMessage:
    return PastMessage("user", text)


def reply(text: str) -> PastMessage:
    return PastMessage("assistant", text)


def test_tokens_are_a_quarter_of_the_characters_rounded_up() -> None:
    assert [estimate_tokens("x" * chars) for chars in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_the_newest_messages_come_oldest_first() -> None:
    assert select_recent([user("c"), reply("b"), user("a")], 100) == [user("a"), reply("b"), user("c")]


def test_a_message_that_fills_the_budget_stays_and_one_that_passes_it_goes() -> None:
    newest_first = [user("x" * 20), reply("y" * 20), user("z")]
    assert select_recent(newest_first, 10) == [reply("y" * 20), user("x" * 20)]
    assert select_recent(newest_first, 9) == [user("x" * 20)]
    assert len(select_recent(newest_first, 11)) == 3


def test_nothing_older_than_a_message_left_out_comes_back() -> None:
    assert select_recent([user("x"), reply("y" * 400), user("z")], 10) == [user("x")]


def test_the_newest_message_stays_though_it_is_larger_than_the_budget() -> None:
    assert select_recent([user("x" * 1000), user("y")], 1) == [user("x" * 1000)]


def test_replies_without_text_are_left_out() -> None:
    assert select_recent([user("b"), reply(""), user("a")], 100) == [user("a"), user("b")]
    assert select_recent([reply(""), user("a")], 0) == [user("a")]


def test_no_messages_select_nothing() -> None:
    assert select_recent([], 100) == []


def test_the_two_system_prompts_become_one_message() -> None:
    assert system_text("thread", "run") == "thread\n\nrun"
    assert [system_text("thread", ""), system_text("", "run"), system_text("", "")] == ["thread", "run", ""]


def test_a_request_begins_with_the_system_message_when_there_is_one() -> None:
    assert to_chat_messages("s", [user("a")]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
    ]
    assert to_chat_messages("", [user("a"), reply("b")])[1] == {"role": "assistant", "content": "b"}
