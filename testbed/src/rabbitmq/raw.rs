//! A producer that sends bytes as they are: what no client library would let pass.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lapin::uri::AMQPUri;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(30);
const METHOD: u8 = 1;
const CONTENT_HEADER: u8 = 2;
const BODY: u8 = 3;
const HEARTBEAT: u8 = 8;
const END: u8 = 0xCE;
const CHANNEL: u16 = 1;

/// A connection with one channel in confirm mode, for messages with any bytes in their properties.
#[derive(Debug)]
pub struct RawProducer {
    stream: TcpStream,
    published: u64,
}

impl RawProducer {
    /// Connects to a broker without TLS.
    pub async fn connect(url: &str) -> Result<Self> {
        timeout(LIMIT, Self::open(url)).await?
    }

    async fn open(url: &str) -> Result<Self> {
        let uri: AMQPUri = url.parse().map_err(anyhow::Error::msg)?;
        let authority = uri.authority;
        let address = (authority.host.as_str(), authority.port);
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut producer = Self {
            stream,
            published: 0,
        };
        producer.stream.write_all(b"AMQP\x00\x00\x09\x01").await?;
        producer.expect([0, 10, 0, 10]).await?;
        let login = authority.userinfo;
        let login = format!("\0{}\0{}", login.username, login.password);
        let login = [
            long(b""),
            short(b"PLAIN"),
            long(login.as_bytes()),
            short(b"en_US"),
        ]
        .concat();
        producer.method(0, [0, 10, 0, 11], &login).await?;
        let tune = producer.expect([0, 10, 0, 30]).await?;
        // Without heartbeats: a test ends sooner.
        let tuned = [&tune[..6], &[0, 0]].concat();
        producer.method(0, [0, 10, 0, 31], &tuned).await?;
        let open = [short(uri.vhost.as_bytes()), short(b""), vec![0]].concat();
        producer.method(0, [0, 10, 0, 40], &open).await?;
        producer.expect([0, 10, 0, 41]).await?;
        producer
            .method(CHANNEL, [0, 20, 0, 10], &short(b""))
            .await?;
        producer.expect([0, 20, 0, 11]).await?;
        producer.method(CHANNEL, [0, 85, 0, 10], &[0]).await?;
        producer.expect([0, 85, 0, 11]).await?;
        Ok(producer)
    }

    /// Publishes a message and waits for its confirm. `properties` are the flags of a content header
    /// and what follows on them.
    pub async fn publish(
        &mut self,
        exchange: &[u8],
        routing_key: &[u8],
        properties: &[u8],
        payload: &[u8],
    ) -> Result<()> {
        let publishing = self.send(exchange, routing_key, properties, payload);
        timeout(LIMIT, publishing).await?
    }

    async fn send(
        &mut self,
        exchange: &[u8],
        routing_key: &[u8],
        properties: &[u8],
        payload: &[u8],
    ) -> Result<()> {
        let arguments = [vec![0, 0], short(exchange), short(routing_key), vec![1]].concat();
        self.method(CHANNEL, [0, 60, 0, 40], &arguments).await?;
        let size = (payload.len() as u64).to_be_bytes();
        let header = [&[0, 60, 0, 0], &size[..], properties].concat();
        self.frame(CONTENT_HEADER, CHANNEL, &header).await?;
        for piece in payload.chunks(100_000) {
            self.frame(BODY, CHANNEL, piece).await?;
        }
        self.published += 1;
        loop {
            let (method, arguments) = self.next_method().await?;
            match method {
                [0, 60, 0, 80] => {
                    let tag = arguments.first_chunk().context("an ack without a tag")?;
                    if u64::from_be_bytes(*tag) >= self.published {
                        return Ok(());
                    }
                }
                [0, 60, 0, 50] => bail!("the broker returned the message"),
                other => bail!("the broker answered {other:?}: {arguments:?}"),
            }
        }
    }

    async fn expect(&mut self, wanted: [u8; 4]) -> Result<Vec<u8>> {
        let (method, arguments) = self.next_method().await?;
        ensure!(method == wanted, "{method:?}: {arguments:?}");
        Ok(arguments)
    }

    async fn next_method(&mut self) -> Result<([u8; 4], Vec<u8>)> {
        loop {
            let kind = self.stream.read_u8().await?;
            self.stream.read_u16().await?;
            let length = self.stream.read_u32().await?;
            let mut payload = vec![0; length as usize];
            self.stream.read_exact(&mut payload).await?;
            ensure!(self.stream.read_u8().await? == END, "no frame");
            if kind == HEARTBEAT {
                continue;
            }
            ensure!(kind == METHOD, "a frame of type {kind}");
            let (method, arguments) = payload.split_first_chunk().context("no method")?;
            return Ok((*method, arguments.to_vec()));
        }
    }

    async fn method(&mut self, channel: u16, method: [u8; 4], arguments: &[u8]) -> Result<()> {
        let payload = [&method, arguments].concat();
        self.frame(METHOD, channel, &payload).await
    }

    async fn frame(&mut self, kind: u8, channel: u16, payload: &[u8]) -> Result<()> {
        let length = u32::try_from(payload.len())?.to_be_bytes();
        let frame = [
            &[kind],
            &channel.to_be_bytes()[..],
            &length,
            payload,
            &[END],
        ];
        self.stream.write_all(&frame.concat()).await?;
        Ok(())
    }
}

/// A short string: its length in one byte.
fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8], text].concat()
}

/// A long string or a table: its length in four bytes.
fn long(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_be_bytes(), bytes].concat()
}
