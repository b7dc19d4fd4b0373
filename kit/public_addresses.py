"""Which IP addresses belong to the public internet: those that a tenant may have this system connect to. Pure."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network

Address = IPv4Address | IPv6Address

# Everything of IPv4 that is somebody's own, nobody's, or many's (IANA's special-purpose registry), and what
# clouds answer instances on.
REFUSED_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this host, unspecified
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # carrier-grade NAT; a cloud's metadata too (100.100.100.200)
        "127.0.0.0/8",  # loopback
        "168.63.129.16/32",  # a cloud's metadata on an address that looks public
        "169.254.0.0/16",  # link-local, and most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarking
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, broadcast
    )
)
# The only part of IPv6 that is routed in public: loopback, unspecified, link-local, unique local (a cloud's
# metadata at fd00:ec2::254 too), site-local, multicast, discard and local NAT64 all lie outside of it.
PUBLIC_V6 = IPv6Network("2000::/3")
REFUSED_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # protocol assignments, benchmarking, ORCHID
        "2001:db8::/32",  # documentation
        "3fff::/20",  # documentation
    )
)
# Networks whose last 32 bits are an IPv4 address.
ENDS_IN_V4 = tuple(
    IPv6Network(network)
    for network in (
        "::/96",  # compatible
        "::ffff:0:0/96",  # mapped
        "::ffff:0:0:0/96",  # translated
        "64:ff9b::/96",  # NAT64
    )
)
SIX_TO_FOUR, TEREDO = IPv6Network("2002::/16"), IPv6Network("2001::/32")


def is_public(address: Address) -> bool:
    """Whether the address is one of the public internet; one that holds an IPv4 address is judged by that."""
    if isinstance(address, IPv4Address):
        return not any(address in network for network in REFUSED_V4)
    if address.scope_id is not None:
        return False
    inside = _v4_inside(address)
    if inside:
        return all(is_public(one) for one in inside)
    return address in PUBLIC_V6 and not any(address in network for network in REFUSED_V6)


def _v4_inside(address: IPv6Address) -> list[IPv4Address]:
    bits = int(address)
    if any(address in network for network in ENDS_IN_V4):
        return [_v4(bits)]
    if address in SIX_TO_FOUR:
        return [_v4(bits >> 80)]
    if address in TEREDO:
        return [_v4(bits >> 64), _v4(~bits)]  # its server, and its client turned round
    return []


def _v4(bits: int) -> IPv4Address:
    return IPv4Address(bits & 0xFFFF_FFFF)


def network(raw: str) -> IPv4Network | IPv6Network:
    """An address or a network in CIDR form. Raises ValueError."""
    return ip_network(raw, strict=False)
