"""The RPCs of BillingService: who may ask, one transaction each, the answer. No SQL."""

from uuid import UUID

from grpc import aio
from prometheus_client import Counter
from sqlalchemy.ext.asyncio import AsyncEngine

from kit import pages
from kit.callers import Caller, Role, current_caller, is_user_id
from kit.db import transaction
from kit.errors import ServiceError, invalid
from kit.rates import to_message
from kit.telemetry import log
from services.billing import limits, translate
from services.billing.domain.periods import PERIODS, WHOLE_PROJECT
from services.billing.domain.terms import Terms
from services.billing.moves import Moves
from services.billing.store import accounts, ledger, rules
from services.billing.store.rules import EVERY_USER
from threadloom.billing.v1 import billing_service_pb2 as api
from threadloom.billing.v1 import billing_service_pb2_grpc as api_grpc

Context = aio.ServicerContext[object, object]

ALARMS = Counter("threadloom_billing_alarms_total", "Numbers that should agree and do not.", ["kind"])


class BillingServicer(api_grpc.BillingServiceServicer):
    """See billing_service.proto."""

    def __init__(self, engine: AsyncEngine, moves: Moves, defaults: Terms) -> None:
        self._engine, self._moves, self._defaults = engine, moves, defaults

    async def PlaceHold(self, request: api.PlaceHoldRequest, context: Context) -> api.PlaceHoldResponse:
        """Sets money aside."""
        _mover(request.project_id)
        call, wish = translate.call_in(request, _user_in(request.user_id)), translate.wish_in(request)
        row = await self._moves.place(call, wish)
        return api.PlaceHoldResponse(hold=translate.hold_out(row))

    async def Settle(self, request: api.SettleRequest, context: Context) -> api.SettleResponse:
        """Books a call."""
        who, usage = _mover(request.project_id), translate.usage_in(request.usage)
        id, estimated = translate.id_in(request.api_call_id, "api_call_id"), request.estimated
        reported = request.cost.nano_usd
        try:
            entry, is_new = await self._moves.settle(
                _project_of(who), id, usage, estimated=estimated, reported=reported
            )
        except ServiceError as error:
            if error.reason == "IDEMPOTENCY_KEY_REUSED":
                ALARMS.labels("settled twice").inc()
                log.error("a call was settled with other numbers", api_call_id=str(id))
            raise
        if is_new and entry.cost_nano != reported:
            ALARMS.labels("cost").inc()
            log.error("costs differ", api_call_id=str(id), reported_nano=reported, booked_nano=entry.cost_nano)
        if is_new and entry.above_hold:
            ALARMS.labels("above hold").inc()
            log.warning("a call cost more than its hold", api_call_id=str(id))
        return api.SettleResponse(entry=translate.entry_out(entry))

    async def Release(self, request: api.ReleaseRequest, context: Context) -> api.ReleaseResponse:
        """Frees a hold, or bars a call that has none."""
        _mover(request.project_id)
        status = await self._moves.release(translate.call_in(request, _user_in(request.user_id)))
        return api.ReleaseResponse(state=translate.STATES[status])

    async def SetPrice(self, request: api.SetPriceRequest, context: Context) -> api.SetPriceResponse:
        """Sets a price."""
        caller = current_caller.get()
        is_for_all = caller.role is Role.SYSTEM and not request.project_id
        who = caller if is_for_all else _admin(request.project_id)
        model, rates = translate.model_in(request.model), translate.rates_in(request.rates)
        async with transaction(self._engine, who) as tx:
            stored = to_message(rates).SerializeToString()
            row = await rules.set_price(tx, who.project or rules.EVERY_PROJECT, model, stored)
        return api.SetPriceResponse(price=translate.price_out(row))

    async def ListPrices(self, request: api.ListPricesRequest, context: Context) -> api.ListPricesResponse:
        """Lists prices."""
        caller = current_caller.get()
        is_for_all = caller.role is Role.SYSTEM and not request.project_id
        who, size = caller if is_for_all else _reader(request.project_id), _size(request.page_size)
        after = translate.price_place_in(request.page_token)
        async with transaction(self._engine, who) as tx:
            rows = await rules.list_prices(tx, who.project or rules.EVERY_PROJECT, after=after, limit=size + 1)
        last = rows[size - 1] if len(rows) > size else None
        return api.ListPricesResponse(
            prices=[translate.price_out(row) for row in rows[:size]],
            next_page_token="" if last is None else translate.price_place_out(last),
        )

    async def SetQuota(self, request: api.SetQuotaRequest, context: Context) -> api.SetQuotaResponse:
        """Sets a quota."""
        who, period = _admin(request.project_id), translate.period_in(request.period)
        user = _user_in(request.user_id) if request.user_id else EVERY_USER
        limit = translate.limit_in(request.limit) if request.HasField("limit") else None
        async with transaction(self._engine, who) as tx:
            await rules.set_quota(tx, _project_of(who), user, period, limit)
            if limit is None:
                return api.SetQuotaResponse()
            if user == EVERY_USER:
                return api.SetQuotaResponse(quota=translate.default_quota_out(period, limit))
            day = await accounts.today(tx)
            sums = await accounts.read(tx, _project_of(who), user, period, day)
        return api.SetQuotaResponse(quota=translate.period_out(period, *sums, limit))

    async def GetQuota(self, request: api.GetQuotaRequest, context: Context) -> api.GetQuotaResponse:
        """Reads a quota."""
        who = _reader(request.project_id)
        user = _own(who, request.user_id) or EVERY_USER
        async with transaction(self._engine, who) as tx:
            found = await rules.get_quota(tx, _project_of(who), user)
            if found is None:
                return api.GetQuotaResponse()
            period, limit = found
            if user == EVERY_USER:
                return api.GetQuotaResponse(quota=translate.default_quota_out(period, limit))
            sums = await accounts.read(tx, _project_of(who), user, period, await accounts.today(tx))
        return api.GetQuotaResponse(quota=translate.period_out(period, *sums, limit))

    async def SetCap(self, request: api.SetCapRequest, context: Context) -> api.SetCapResponse:
        """Sets a cap."""
        who, period = _admin(request.project_id), translate.period_in(request.period)
        limit = translate.limit_in(request.limit) if request.HasField("limit") else None
        async with transaction(self._engine, who) as tx:
            await rules.set_cap(tx, _project_of(who), period, limit)
            if limit is None:
                return api.SetCapResponse()
            day = await accounts.today(tx)
            sums = await accounts.read(tx, _project_of(who), WHOLE_PROJECT, period, day)
        return api.SetCapResponse(cap=translate.period_out(period, *sums, limit))

    async def GetCap(self, request: api.GetCapRequest, context: Context) -> api.GetCapResponse:
        """Reads the caps."""
        who = _admin(request.project_id)
        async with transaction(self._engine, who) as tx:
            day = await accounts.today(tx)
            caps = [
                translate.period_out(
                    period, *await accounts.read(tx, _project_of(who), WHOLE_PROJECT, period, day), limit
                )
                for period, limit in await rules.get_caps(tx, _project_of(who))
            ]
        return api.GetCapResponse(caps=caps)

    async def GetUsage(self, request: api.GetUsageRequest, context: Context) -> api.GetUsageResponse:
        """Reads what was spent."""
        who = _reader(request.project_id)
        project, user = _project_of(who), _own(who, request.user_id)
        async with transaction(self._engine, who) as tx:
            day = await accounts.today(tx)
            quota = await rules.get_quota(tx, project, user) if user else None
            known = dict(await rules.get_caps(tx, project) if not user else [quota] if quota else [])
            periods = [
                translate.period_out(period, *await accounts.read(tx, project, user, period, day), known.get(period))
                for period in PERIODS
            ]
        return api.GetUsageResponse(periods=periods)

    async def SetTerms(self, request: api.SetTermsRequest, context: Context) -> api.SetTermsResponse:
        """Sets terms."""
        who, given = _admin(request.project_id), translate.terms_in(request.terms)
        async with transaction(self._engine, who) as tx:
            await rules.set_terms(tx, _project_of(who), *given)
            terms = await rules.get_terms(tx, _project_of(who), self._defaults)
        return api.SetTermsResponse(terms=translate.terms_out(terms))

    async def GetTerms(self, request: api.GetTermsRequest, context: Context) -> api.GetTermsResponse:
        """Reads the terms in force."""
        who = _admin(request.project_id)
        async with transaction(self._engine, who) as tx:
            terms = await rules.get_terms(tx, _project_of(who), self._defaults)
        return api.GetTermsResponse(terms=translate.terms_out(terms))

    async def ListLedger(self, request: api.ListLedgerRequest, context: Context) -> api.ListLedgerResponse:
        """Lists ledger entries."""
        who, size = _reader(request.project_id), _size(request.page_size)
        user, before = _own(who, request.user_id), pages.decode_time(request.page_token)
        async with transaction(self._engine, who) as tx:
            rows = await ledger.list_entries(tx, _project_of(who), user, before=before, limit=size + 1)
        last = rows[size - 1] if len(rows) > size else None
        return api.ListLedgerResponse(
            entries=[translate.entry_out(row) for row in rows[:size]],
            next_page_token="" if last is None else pages.encode_time(last.booked_at, last.api_call_id),
        )


def _mover(project: str) -> Caller:
    """Who moves money: one of our services, within the project it names."""
    if current_caller.get().role is not Role.SYSTEM:
        raise ServiceError("FORBIDDEN", "Only a service of ours may call this.")
    return Caller(Role.SYSTEM, translate.id_in(project, "project_id"))


def _admin(project: str) -> Caller:
    """Who may set a project's limits and prices: its service role, or one of our services."""
    if current_caller.get().role is Role.USER:
        raise ServiceError("FORBIDDEN", "Only the project's service role may call this.")
    return _reader(project)


def _reader(project: str) -> Caller:
    """The caller within the project it names; within its own if it has one."""
    who = current_caller.get()
    if who.role is Role.SYSTEM:
        return Caller(Role.SYSTEM, translate.id_in(project, "project_id"))
    if project and project != str(who.project):
        raise ServiceError("FORBIDDEN", "This project is not yours.")
    return who


def _own(who: Caller, user: str) -> str:
    """The user that is asked about; a user may ask about itself."""
    if who.role is not Role.USER:
        return _user_in(user) if user else ""
    if user and user != who.user:
        raise ServiceError("FORBIDDEN", "You may see only your own usage.")
    return who.user


def _user_in(user: str) -> str:
    if not is_user_id(user):
        raise invalid("user_id", "user_id must be 1 to 255 printable characters.")
    return user


def _project_of(who: Caller) -> UUID:
    assert who.project is not None  # _mover, _admin and _reader see to it
    return who.project


def _size(asked: int) -> int:
    if asked < 0:
        raise invalid("page_size", "page_size must not be negative.")
    return min(asked or limits.PAGE, limits.PAGE_MAX)
