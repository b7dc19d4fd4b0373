"""The command line of the local stack."""

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

from deploy.local import logs, migration, prices, reset, running
from deploy.local.data_folder import DataFolder
from deploy.local.processes import StackError
from deploy.local.settings import data_dir
from deploy.local.stack import FIRST_PROJECT
from deploy.local.up import up
from kit.settings import SettingsError

INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; says what is wrong on stderr."""
    asked = _parser().parse_args(arguments)
    try:
        return _run(asked, os.environ)
    except SettingsError as error:
        print(f"These settings need a change:\n{error}", file=sys.stderr)
    except StackError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, a folder that is not ours
        print(f"The system refused: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 1


def _run(asked: argparse.Namespace, environ: Mapping[str, str]) -> int:
    if asked.command == "up":
        return up(environ)
    folder = DataFolder(data_dir(environ))
    match asked.command:
        case "stop":
            running.stop(folder)
        case "logs":
            # Ctrl-C is the ordinary end of following, so make has no error to report.
            with contextlib.suppress(KeyboardInterrupt):
                logs.follow(folder, asked.service)
        case "reset":
            reset.reset(folder)
        case "project":
            running.create_project(folder, asked.name)
        case "token":
            running.mint_token(folder, asked.user, asked.project or FIRST_PROJECT)
        case "price":
            wish = prices.PriceWish(
                asked.model, asked.input, asked.output, asked.cached, asked.cache_write, asked.fee, asked.project
            )
            prices.price_model(folder, wish)
        case "provider-key":
            answer = running.delete_provider_key if asked.remove else running.set_provider_key
            answer(folder, asked.provider, asked.project or FIRST_PROJECT)
        case "migration":
            migration.draft(asked.service, asked.name)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deploy.local", description="The local stack of Threadloom.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start the whole stack; Ctrl-C stops it")
    commands.add_parser("stop", help="stop the stack that runs in another terminal")
    logs_of = commands.add_parser("logs", help="follow a service's log")
    logs_of.add_argument("service", nargs="?", default="", help="such as gateway, or gateway-1")
    commands.add_parser("reset", help="delete the stack's data")
    project = commands.add_parser("project", help="create a project and print its keys")
    project.add_argument("name", nargs="?", default="", help="its slug, such as acme")
    token = commands.add_parser("token", help="print a user's token, good for 30 days")
    token.add_argument("user", nargs="?", default="", help="the user's id, such as carol")
    token.add_argument("project", nargs="?", default="", help=f"a project's slug; {FIRST_PROJECT} when left out")
    price = commands.add_parser("price", help="set what a model costs, in USD per million tokens")
    price.add_argument("model", nargs="?", default="", help="its slug, such as gpt-4o-mini")
    price.add_argument("--in", dest="input", default="", metavar="USD", help="input")
    price.add_argument("--out", dest="output", default="", metavar="USD", help="output")
    price.add_argument("--cached", default="", metavar="USD", help="input read from the provider's cache; as --in")
    price.add_argument("--cache-write", default="", metavar="USD", help="input written to that cache; as --in")
    price.add_argument("--fee", default="", metavar="USD", help="for each call, besides its tokens; none")
    price.add_argument("--project", default="", help="only for the project of this slug; for every one")
    key = commands.add_parser("provider-key", help="keep a project's key of a model provider, read from stdin")
    key.add_argument("provider", nargs="?", default="", help="such as openai")
    key.add_argument("project", nargs="?", default="", help=f"a project's slug; {FIRST_PROJECT} when left out")
    key.add_argument("--remove", action="store_true", help="delete the key instead")
    drafted = commands.add_parser("migration", help="draft a migration from the difference to schema.py")
    drafted.add_argument("service", nargs="?", default="", help="such as conversation")
    drafted.add_argument("name", nargs="?", default="", help="what it does, such as add_x")
    return parser
