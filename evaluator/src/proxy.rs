//! The way out for foreign code: an HTTP proxy of this process that goes to public addresses and to networks that the settings name,
//! never to this machine, to its neighbours on the link, or to where clouds keep their secrets.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::time::timeout;

/// How long a server may take to answer a knock.
const CONNECT: Duration = Duration::from_secs(20);
/// Lines before the body, at most.
const HEAD: u64 = 64 << 10;

/// A range of addresses, as `10.0.0.0/8` or `fd00::/8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Net {
    address: IpAddr,
    bits: u32,
}

/// Not a range of addresses.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a range of addresses: write it as 10.0.0.0/8 or fd00::/8")]
pub struct NetError(String);

impl std::str::FromStr for Net {
    type Err = NetError;

    fn from_str(text: &str) -> Result<Self, NetError> {
        let error = || NetError(text.to_owned());
        let (address, bits) = text.split_once('/').ok_or_else(error)?;
        let address: IpAddr = address.parse().map_err(|_| error())?;
        let bits: u32 = bits.parse().map_err(|_| error())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        if bits <= most { Ok(Self { address, bits }) } else { Err(error()) }
    }
}

impl Net {
    fn contains(&self, address: IpAddr) -> bool {
        let same = |left: u128, right: u128, all: u32| {
            let rest = all - self.bits;
            rest >= 128 || (left >> rest) == (right >> rest)
        };
        match (self.address, address) {
            (IpAddr::V4(net), IpAddr::V4(address)) => {
                same(net.to_bits().into(), address.to_bits().into(), 32)
            }
            (IpAddr::V6(net), IpAddr::V6(address)) => same(net.to_bits(), address.to_bits(), 128),
            _ => false,
        }
    }
}

/// Whether anybody may be sent there: a public address, or one of `more`.
pub fn allowed(address: IpAddr, more: &[Net]) -> bool {
    let address = address.to_canonical();
    more.iter().any(|net| net.contains(address))
        || match address {
            IpAddr::V4(address) => is_public_v4(address),
            IpAddr::V6(address) => is_public_v6(address),
        }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [first, second, ..] = address.octets();
    let shared = first == 100 && (64..128).contains(&second);
    let special =
        address.is_loopback() || address.is_link_local() || address.is_private() || address.is_unspecified();
    !(special || shared || first == 0 || address.is_multicast() || first >= 240)
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    // 64:ff9b::/96 and 2002::/16 have an older address inside.
    let inside = match address.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
            Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)))
        }
        [0x2002, high, low, ..] => Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low))),
        _ => None,
    };
    let special = address.is_loopback() || address.is_unspecified() || address.is_multicast();
    let local = address.is_unique_local() || address.is_unicast_link_local() || address.to_ipv4().is_some();
    !(special || local) && inside.is_none_or(is_public_v4)
}

/// Listens on this machine; answers the port.
pub async fn start(networks: Vec<Net>) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let port = listener.local_addr()?.port();
    let networks = Arc::new(networks);
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((client, _)) => drop(tokio::spawn(pass(client, Arc::clone(&networks)))),
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    });
    Ok(port)
}

async fn pass(client: TcpStream, networks: Arc<Vec<Net>>) {
    let mut client = BufReader::new(client);
    let passed = async {
        let head = head(&mut client).await?;
        let request = Request::parse(&head).ok_or("400 This is a proxy")?;
        let mut server = reach(&request.host, request.port, &networks).await?;
        let begun = match request.first {
            Some(first) => server.write_all(first.as_bytes()).await,
            None => client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await,
        };
        begun.map_err(|_| "502 The server is gone")?;
        // How it ends is between the two of them.
        let _ = copy_bidirectional(&mut client, &mut server).await;
        Ok::<(), &'static str>(())
    };
    if let Err(refusal) = passed.await {
        let _ = client.write_all(format!("HTTP/1.1 {refusal}\r\nContent-Length: 0\r\n\r\n").as_bytes()).await;
    }
}

async fn head(client: &mut BufReader<TcpStream>) -> Result<String, &'static str> {
    let mut head = String::new();
    let mut bounded = client.take(HEAD);
    loop {
        match bounded.read_line(&mut head).await {
            Ok(1..) if head.ends_with("\r\n\r\n") => return Ok(head),
            Ok(1..) => {}
            _ => return Err("400 This is no request"),
        }
    }
}

/// Names are resolved once, here: what was looked at is what is connected to.
async fn reach(host: &str, port: u16, networks: &[Net]) -> Result<TcpStream, &'static str> {
    let addresses = lookup_host((host, port)).await.map_err(|_| "502 There is no such host")?;
    let addresses: Vec<SocketAddr> = addresses.filter(|address| allowed(address.ip(), networks)).collect();
    if addresses.is_empty() {
        tracing::debug!(host, port, "refused");
        return Err("403 Evaluations do not reach private addresses: see HARMONIA_CI_EVAL_NETWORKS");
    }
    match timeout(CONNECT, TcpStream::connect(addresses.as_slice())).await {
        Ok(Ok(server)) => Ok(server),
        _ => Err("502 The server does not answer"),
    }
}

/// What a client wants of a proxy.
#[derive(Debug, PartialEq, Eq)]
struct Request {
    host: String,
    port: u16,
    /// What the server is to hear first; None: whatever the client says next.
    first: Option<String>,
}

impl Request {
    fn parse(head: &str) -> Option<Self> {
        let (line, rest) = head.split_once("\r\n")?;
        let mut words = line.split(' ');
        let (verb, target) = (words.next()?, words.next()?);
        if verb == "CONNECT" {
            let (host, port) = authority(target, None)?;
            return Some(Self { host, port, first: None });
        }
        let (authority_part, path) = match target.strip_prefix("http://")?.split_once('/') {
            Some((authority, path)) => (authority, path),
            None => (target.strip_prefix("http://")?, ""),
        };
        let (host, port) = authority(authority_part, Some(80))?;
        // One request a connection: the next one may be for another host.
        let kept = |line: &&str| {
            let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
            !matches!(name.as_str(), "connection" | "proxy-connection" | "proxy-authorization" | "keep-alive")
        };
        let headers: Vec<&str> =
            rest.trim_end().split("\r\n").filter(|line| !line.is_empty()).filter(kept).collect();
        let headers = headers.iter().map(|line| format!("{line}\r\n")).collect::<String>();
        let first = format!("{verb} /{path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n");
        Some(Self { host, port, first: Some(first) })
    }
}

fn authority(text: &str, default: Option<u16>) -> Option<(String, u16)> {
    let text = text.rsplit_once('@').map_or(text, |(_, host)| host);
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().ok()?),
        _ => (text, default?),
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn may(address: &str, more: &[&str]) -> bool {
        let more: Vec<Net> = more.iter().map(|net| net.parse().unwrap()).collect();
        allowed(address.parse().unwrap(), &more)
    }

    #[test]
    fn public_addresses_are_reached() {
        for address in ["140.82.121.4", "1.1.1.1", "2606:4700::1111", "100.128.0.1"] {
            assert!(may(address, &[]), "{address}");
        }
    }

    #[test]
    fn this_machine_its_neighbours_and_metadata_are_not() {
        for address in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "169.254.169.254",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "100.64.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "fd00:ec2::254",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "64:ff9b::7f00:1",
            "2002:7f00:1::",
            "::127.0.0.1",
        ] {
            assert!(!may(address, &[]), "{address}");
        }
    }

    #[test]
    fn a_network_that_is_named_is_reached_and_no_other() {
        assert!(may("10.1.2.3", &["10.0.0.0/8"]) && may("fd12::1", &["fd00::/8"]));
        assert!(!may("192.168.0.1", &["10.0.0.0/8"]));
        assert!(may("192.168.0.1", &["0.0.0.0/0"]));
        for bad in ["10.0.0.0", "10.0.0.0/33", "x/8", ""] {
            assert!(bad.parse::<Net>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_tunnel_has_a_host_and_a_port() {
        let request =
            Request::parse("CONNECT github.com:443 HTTP/1.1\r\nHost: github.com:443\r\n\r\n").unwrap();
        assert_eq!((request.host.as_str(), request.port, request.first), ("github.com", 443, None));
        let request = Request::parse("CONNECT [::1]:22 HTTP/1.1\r\n\r\n").unwrap();
        assert_eq!((request.host.as_str(), request.port), ("::1", 22));
    }

    #[test]
    fn a_plain_request_is_handed_on_without_what_was_for_the_proxy() {
        let head = "GET http://me@host:81/a/b?c HTTP/1.1\r\nHost: host:81\r\nProxy-Connection: keep-alive\r\nAccept: */*\r\n\r\n";
        let request = Request::parse(head).unwrap();
        assert_eq!((request.host.as_str(), request.port), ("host", 81));
        let first = "GET /a/b?c HTTP/1.1\r\nHost: host:81\r\nAccept: */*\r\nConnection: close\r\n\r\n";
        assert_eq!(request.first.as_deref(), Some(first));
    }

    #[test]
    fn nonsense_is_no_request() {
        for head in [
            "",
            "GET / HTTP/1.1\r\n\r\n",
            "CONNECT :1 HTTP/1.1\r\n\r\n",
            "CONNECT host HTTP/1.1\r\n\r\n",
            "x\r\n\r\n",
        ] {
            assert_eq!(Request::parse(head), None, "{head}");
        }
    }
}
