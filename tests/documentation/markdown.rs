//! A page of Markdown, as far as the checks need it.

use pulldown_cmark::{BrokenLink, CodeBlockKind, Event, LinkType, Options, Parser, Tag, TagEnd};

/// A page with its path from the root of the repository.
#[derive(Default)]
pub(crate) struct Page {
    pub(crate) path: String,
    /// The pieces of code in the text, with their lines.
    pub(crate) spans: Vec<(usize, String)>,
    pub(crate) blocks: Vec<Block>,
    /// Also the pictures.
    pub(crate) links: Vec<Link>,
    /// The names of references that no line defines.
    pub(crate) undefined: Vec<String>,
    /// The anchors of the headings, as repository pages and rustdoc make them.
    pub(crate) anchors: Vec<String>,
}

/// A block of code.
pub(crate) struct Block {
    /// That of the opening fence.
    pub(crate) line: usize,
    pub(crate) language: String,
    pub(crate) text: String,
}

pub(crate) struct Link {
    pub(crate) line: usize,
    pub(crate) target: String,
    /// That of the reference; none if the target stands in the text.
    pub(crate) name: Option<String>,
}

impl Page {
    pub(crate) fn new(path: &str, text: &str) -> Self {
        let mut page = Self {
            path: path.to_owned(),
            ..Self::default()
        };
        let mut undefined = Vec::new();
        let on_undefined = |link: BrokenLink<'_>| {
            // Other words in brackets are no link.
            if link.link_type == LinkType::Reference || link.reference.starts_with('`') {
                undefined.push(link.reference.into_string());
            }
            None
        };
        let options = Options::ENABLE_TABLES | Options::ENABLE_TASKLISTS;
        let parser = Parser::new_with_broken_link_callback(text, options, Some(on_undefined));
        let mut heading = None;
        let mut is_block = false;
        for (event, range) in parser.into_offset_iter() {
            let line = 1 + text[..range.start].matches('\n').count();
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    page.anchors.extend(heading.take().as_deref().map(anchor));
                }
                Event::Start(Tag::CodeBlock(kind)) => {
                    let language = match kind {
                        CodeBlockKind::Fenced(language) => language.into_string(),
                        CodeBlockKind::Indented => String::new(),
                    };
                    let text = String::new();
                    page.blocks.push(Block {
                        line,
                        language,
                        text,
                    });
                    is_block = true;
                }
                Event::End(TagEnd::CodeBlock) => is_block = false,
                Event::Start(
                    Tag::Link {
                        link_type,
                        dest_url,
                        id,
                        ..
                    }
                    | Tag::Image {
                        link_type,
                        dest_url,
                        id,
                        ..
                    },
                ) => {
                    let is_inline = link_type == LinkType::Inline;
                    page.links.push(Link {
                        line,
                        target: dest_url.into_string(),
                        name: (!is_inline).then(|| id.into_string()),
                    });
                }
                Event::Text(piece) if is_block => {
                    let block = page.blocks.last_mut();
                    block.expect("it has begun").text += &piece;
                }
                Event::Text(piece) => {
                    if let Some(heading) = &mut heading {
                        *heading += &piece;
                    }
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        *heading += &code;
                    }
                    page.spans.push((line, code.into_string()));
                }
                _ => {}
            }
        }
        page.undefined = undefined;
        page
    }

    /// `path:line`, for a message.
    pub(crate) fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.path)
    }
}

fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase().replace(' ', "-");
    heading.replace(
        |c: char| !c.is_alphanumeric() && !['-', '_'].contains(&c),
        "",
    )
}
