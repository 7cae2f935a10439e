//! What all plots of the examples share: size, colours, an embedded font, and both formats.

// Each example uses a part of it.
#![allow(dead_code)]

use std::{fs, path::Path};

use anyhow::{Context, anyhow};
use plotters::{
    coord::Shift,
    prelude::*,
    style::{FontStyle, register_font},
};

/// The size in pixels.
pub(crate) const SIZE: (u32, u32) = (760, 440);
pub(crate) const FONT: &str = "sans-serif";
/// Colours for most kinds of colour vision (after Okabe and Ito), and a grey.
pub(crate) const COLORS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(213, 94, 0),
    RGBColor(120, 120, 120),
    RGBColor(220, 205, 60),
];

/// A drawing on any backend.
pub(crate) trait Picture {
    fn draw<B: DrawingBackend>(&self, area: &DrawingArea<B, Shift>) -> anyhow::Result<()>
    where
        B::ErrorType: 'static;
}

/// Draws a plot into `out`, as `name.svg` and `name.png`.
pub(crate) fn both(out: &Path, name: &str, picture: &impl Picture) -> anyhow::Result<()> {
    // Registering the font again does nothing.
    register_font(FONT, FontStyle::Normal, epaint_default_fonts::UBUNTU_LIGHT).map_err(|_| anyhow!("no font"))?;
    let path = out.join(format!("{name}.svg"));
    let mut svg = String::new();
    picture.draw(&SVGBackend::with_string(&mut svg, SIZE).into_drawing_area())?;
    fs::write(&path, svg).with_context(|| format!("{} cannot be written", path.display()))?;

    let path = out.join(format!("{name}.png"));
    let mut pixels = vec![255; (SIZE.0 * SIZE.1 * 3) as usize];
    picture.draw(&BitMapBackend::with_buffer(&mut pixels, SIZE).into_drawing_area())?;
    let file = fs::File::create(&path).with_context(|| format!("{} cannot be written", path.display()))?;
    let mut png = png::Encoder::new(file, SIZE.0, SIZE.1);
    png.set_color(png::ColorType::Rgb);
    png.write_header()?.write_image_data(&pixels)?;
    Ok(())
}
