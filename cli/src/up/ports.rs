//! Where the parts listen.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};

use super::error::UpError;

/// Below the ports that outgoing connections get, one of which would stand in the way of a part that is started again.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;
const TRIES: u32 = 100;

/// A port that nobody listens on.
pub fn free_port(ip: IpAddr) -> Result<SocketAddr, UpError> {
    let random = || SocketAddr::new(ip, FIRST + rand::random::<u16>() % COUNT);
    let free = (0..TRIES).map(|_| random()).find(|address| TcpListener::bind(address).is_ok());
    free.map_or_else(|| TcpListener::bind((ip, 0)).and_then(|any| any.local_addr()), Ok)
        .map_err(|source| UpError::Listen { address: SocketAddr::new(ip, 0), source })
}

/// Takes the port that was asked for, so that nothing is started if it cannot be had.
pub fn take(address: SocketAddr) -> Result<(TcpListener, SocketAddr), UpError> {
    let taken = TcpListener::bind(address).and_then(|listener| {
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    });
    taken.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => UpError::PortTaken { address },
        _ => UpError::Listen { address, source },
    })
}
