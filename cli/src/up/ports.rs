//! Where the parts listen.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;

use super::error::{UpError, patiently};
use super::secrets;

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

/// The port that the file names, for URLs that were given out name it too, or else a free one, which is in the file from then on.
pub fn kept(file: &Path, ip: IpAddr, option: &'static str) -> Result<SocketAddr, UpError> {
    let port = fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok());
    if let Some(port) = port {
        return patiently(|| take(SocketAddr::new(ip, port), option)).map(|(_, address)| address);
    }
    let address = free_port(ip)?;
    secrets::write(file, &address.port().to_string())?;
    Ok(address)
}

/// Takes the port that an option asks for, so that nothing is started if it cannot be had.
pub fn take(address: SocketAddr, option: &'static str) -> Result<(TcpListener, SocketAddr), UpError> {
    let taken = TcpListener::bind(address).and_then(|listener| {
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    });
    taken.map_err(|source| match source.kind() {
        io::ErrorKind::AddrInUse => UpError::PortTaken { address, option },
        _ => UpError::Listen { address, source },
    })
}
