//! Reading ranges of a data object: of a mounted file system, or by HTTP.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Cause, Doing, Error, Result, StoreError};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// For all of an answer: also a store that gives a byte now and then holds a thread no longer.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// As many as threads ask at once.
const IDLE_CONNECTIONS: usize = 16;
const ADDRESSES_MAX: usize = 8;
const RANGE_CHARS_MAX: usize = 80;

pub enum Source {
    File(PathBuf),
    Http { agent: ureq::Agent, url: String },
}

/// Keeps the connections to a host, whose addresses the node has found: a static program has no resolver of its own.
pub fn agent(url: &str, addresses: &[String], authorities: &str) -> Result<ureq::Agent> {
    let addresses = addresses
        .iter()
        .take(ADDRESSES_MAX)
        .map(|text| text.parse::<SocketAddr>())
        .collect::<std::result::Result<Vec<_>, _>>()
        .map_err(|error| Error::Invalid(format!("not an address: {error}")))?;
    if addresses.is_empty() {
        return Err(Error::Invalid(
            "a store by HTTP needs the addresses of its host".into(),
        ));
    }
    let mut builder = ureq::AgentBuilder::new()
        .timeout_connect(CONNECT_TIMEOUT)
        .timeout(REQUEST_TIMEOUT)
        .redirects(0)
        .max_idle_connections(IDLE_CONNECTIONS)
        .max_idle_connections_per_host(IDLE_CONNECTIONS)
        .resolver(move |_: &str| Ok(addresses.clone()));
    if url.starts_with("https://") {
        builder = builder.tls_config(Arc::new(tls(authorities)?));
    } else if !url.starts_with("http://") {
        return Err(Error::Invalid("a store is read by http: or https:".into()));
    }
    Ok(builder.build())
}

impl Source {
    /// These bytes; or fewer, from the first on, and why there are no more.
    pub fn read(&self, offset: u64, length: usize) -> (Vec<u8>, Option<StoreError>) {
        let mut bytes = Vec::with_capacity(length);
        let read = match self {
            Source::File(path) => read_file(path, offset, length, &mut bytes),
            Source::Http { agent, url } => read_http(agent, url, offset, length, &mut bytes),
        };
        (bytes, read.err())
    }
}

fn tls(authorities: &str) -> Result<rustls::ClientConfig> {
    let bytes = std::fs::read(authorities).doing(format!("reading {authorities}"))?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in rustls_pemfile::certs(&mut bytes.as_slice()).flatten() {
        // One that this library cannot read is of no use here; the others are.
        let _ = roots.add(certificate);
    }
    if roots.is_empty() {
        return Err(Error::Invalid(format!(
            "{authorities} holds no certificate"
        )));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    Ok(rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Invalid(format!("TLS cannot be set up: {error}")))?
        .with_root_certificates(roots)
        .with_no_client_auth())
}

fn read_file(
    path: &PathBuf,
    offset: u64,
    length: usize,
    bytes: &mut Vec<u8>,
) -> std::result::Result<(), StoreError> {
    // Opened each time: a file system that came back has other handles.
    let failed = |error: std::io::Error| {
        let cause = match error.kind() {
            std::io::ErrorKind::NotFound => Cause::Gone,
            std::io::ErrorKind::PermissionDenied => Cause::Denied,
            _ => Cause::Unavailable,
        };
        StoreError::new(cause, format!("{}: {error}", path.display()))
    };
    let mut file = File::open(path).map_err(failed)?;
    file.seek(SeekFrom::Start(offset)).map_err(failed)?;
    let read = file.take(length as u64).read_to_end(bytes);
    read.map_err(failed)?;
    if bytes.len() < length {
        let why = format!("{} is shorter than was published", path.display());
        return Err(StoreError::new(Cause::Corrupt, why));
    }
    Ok(())
}

fn read_http(
    agent: &ureq::Agent,
    url: &str,
    offset: u64,
    length: usize,
    bytes: &mut Vec<u8>,
) -> std::result::Result<(), StoreError> {
    let last = offset + length as u64 - 1;
    let answer = agent
        .get(url)
        .set("Range", &format!("bytes={offset}-{last}"))
        .set("Accept-Encoding", "identity")
        .call()
        .map_err(refused)?;
    let whole = answer.header("Content-Range").unwrap_or_default();
    if answer.status() != 206 || !whole.starts_with(&format!("bytes {offset}-{last}/")) {
        let status = answer.status();
        let whole: String = whole.chars().take(RANGE_CHARS_MAX).collect();
        return Err(StoreError::new(
            Cause::Unavailable,
            format!("the store answers {status} with range {whole:?} to a request for bytes {offset}-{last}"),
        ));
    }
    answer
        .into_reader()
        .take(length as u64)
        .read_to_end(bytes)
        .map_err(|error| {
            StoreError::new(Cause::Unreachable, format!("the answer broke off: {error}"))
        })?;
    if bytes.len() != length {
        return Err(StoreError::new(
            Cause::Unreachable,
            format!("the answer ended after {} of {length} bytes", bytes.len()),
        ));
    }
    Ok(())
}

/// The URL may hold a signature, so it is in no message.
fn refused(error: ureq::Error) -> StoreError {
    match error {
        ureq::Error::Status(status, _) => {
            let cause = match status {
                401 | 403 => Cause::Denied,
                404 | 410 | 416 => Cause::Gone,
                _ => Cause::Unavailable,
            };
            StoreError::new(cause, format!("the store answers {status}"))
        }
        ureq::Error::Transport(transport) => StoreError::new(
            Cause::Unreachable,
            format!(
                "{}: {}",
                transport.kind(),
                transport.message().unwrap_or("no answer")
            ),
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::*;

    /// A store that says `answer` to whoever asks, and hangs up.
    fn ask(answer: &'static str) -> (Vec<u8>, Option<StoreError>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let lines = BufReader::new(socket.try_clone().unwrap()).lines();
            let asked: Vec<String> = lines
                .map_while(|line| line.ok().filter(|line| !line.is_empty()))
                .collect();
            socket.write_all(answer.as_bytes()).unwrap();
            asked
        });
        let url = "http://store.invalid/data/x?Signature=secret".to_string();
        let agent = agent(&url, &[address], "").unwrap();
        let read = Source::Http { agent, url }.read(10, 6);
        let asked = server.join().unwrap();
        assert!(asked.iter().any(|line| line == "Range: bytes=10-15"));
        if let Some(error) = &read.1 {
            assert!(!error.detail.contains("secret"), "{}", error.detail);
        }
        read
    }

    #[test]
    fn a_range_is_read_also_in_pieces() {
        let whole = "HTTP/1.1 206 Partial\r\nContent-Range: bytes 10-15/99\r\nContent-Length: 6\r\n\r\nchunks";
        let pieces = "HTTP/1.1 206 Partial\r\nContent-Range: bytes 10-15/99\r\nTransfer-Encoding: chunked\r\n\r\n\
                      2\r\nch\r\n4\r\nunks\r\n0\r\n\r\n";
        for answer in [whole, pieces] {
            assert_eq!(ask(answer), (b"chunks".to_vec(), None));
        }
    }

    #[test]
    fn an_answer_that_breaks_off_gives_what_has_come() {
        let (bytes, error) = ask(
            "HTTP/1.1 206 Partial\r\nContent-Range: bytes 10-15/99\r\nContent-Length: 6\r\n\r\nchu",
        );

        assert_eq!(bytes, b"chu");
        assert_eq!(error.unwrap().cause, Cause::Unreachable);
    }

    #[test]
    fn what_is_not_the_range_is_not_taken() {
        let answers = [
            ("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nchunks", Cause::Unavailable),
            (
                "HTTP/1.1 206 Partial\r\nContent-Range: bytes 0-5/99\r\nContent-Length: 6\r\n\r\nchunks",
                Cause::Unavailable,
            ),
            ("HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n", Cause::Unavailable),
            ("HTTP/1.1 403 No\r\n\r\n", Cause::Denied),
            ("HTTP/1.1 404 No\r\n\r\n", Cause::Gone),
            ("HTTP/1.1 503 Later\r\n\r\n", Cause::Unavailable),
            ("nonsense\r\n\r\n", Cause::Unreachable),
        ];
        for (answer, cause) in answers {
            let (bytes, error) = ask(answer);
            assert!(bytes.is_empty(), "{answer}");
            assert_eq!(error.map(|error| error.cause), Some(cause), "{answer}");
        }
    }
}
